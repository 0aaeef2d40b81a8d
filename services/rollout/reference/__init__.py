"""The `reference` rollout engine: a small torch server with SGLang's HTTP face, for machines without an accelerator."""
