"""For tests and fault runs, ours and those of whoever embeds the engine; nothing of the product imports it."""
