"""The drafter's parts: backbone, sequential heads, confidence head, and the cache of projected context."""
