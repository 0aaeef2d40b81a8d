"""The proxy: a harness speaks its model API to it, it speaks token ids to the engines and records every call."""
