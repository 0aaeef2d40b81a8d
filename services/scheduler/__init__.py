"""The scheduler: the ledger of executions, placement, roles of cells, bursts and batches."""
