"""Images, which no policy here reads: see `gpu_only`. The real package wants to be built for the torch beside it."""

from gpu_only import stand_in

stand_in(__name__)
