"""A few tokens of a tiny Mixtral with random weights: the engine finds the family through its entry point.

python try_it.py
"""

import tempfile

import transformers

from deepinfer import LLM, SamplingParams


def main() -> None:
    config = transformers.MixtralConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=256,
    )
    with tempfile.TemporaryDirectory() as folder:
        transformers.MixtralForCausalLM(config).save_pretrained(folder)
        with LLM(folder) as llm:
            # ids, because these weights have no tokenizer
            output = llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False))[0]
            print(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
