"""What models are made of: shards, weights and their loader, linear, embedding, norms, rotary, the decoder layer."""
