"""Structured output: grammars that tokens are sampled by."""
