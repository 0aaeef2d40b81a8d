"""One module a model API: pure functions from its requests to conversations, and from answers to its bytes."""
