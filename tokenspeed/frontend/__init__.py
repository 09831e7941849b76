"""Text in, text out: tokenizer, chat template, detokenizer, stop strings, and the wire to the engine."""
