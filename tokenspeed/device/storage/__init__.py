"""The storage tier: cache blocks by key, in something that outlives the engine."""
