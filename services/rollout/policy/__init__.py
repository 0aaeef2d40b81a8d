"""The quickstart's starting policy: tokenizer, demonstrations, a short supervised warm start, and its measure."""

import os

# Read when torch is loaded. Threads that spin while they wait for each other take five times as long on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
