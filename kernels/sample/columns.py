"""Columns of the packed table of sampling values, one row of int32 words a state slot; floats are stored by their bits."""

TEMPERATURE, TOP_K, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, SEED_LOW, SEED_HIGH, PROMPT_LEN, MIN_TOKENS, GREEDY = range(12)
NUM_COLUMNS = 12
