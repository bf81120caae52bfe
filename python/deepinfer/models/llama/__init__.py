"""The Llama family: Llama (SmolLM2 too), Mistral, Qwen2, Qwen3.

Owns: pre-norm decoder layers of grouped-query attention with rotary positions and a gated feed-forward block. Never
touches: checkpoint formats, KV allocation, sampling.
"""
