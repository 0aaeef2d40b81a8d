"""`gyre bench proxy`: what a model call costs in the proxy, beside the same client against the same engine directly."""
