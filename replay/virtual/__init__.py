"""Programs on asyncio under a virtual clock: a loop without a selector, lives of processes, a network between them."""
