"""The quickstart's starting policy: tokenizer, demonstrations, a short supervised warm start, and its measure."""
