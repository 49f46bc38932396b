"""Run folders: their format, and what is read back from them."""
