"""Answers a few prompts at once; the results come back in the order of the prompts.

python examples/generate.py [model]
"""

import sys

from deepinfer import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The three states of matter are", "To make a cup of tea, first"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with LLM(model) as llm:
        # One set of values for all, or a list with one for each prompt.
        greedy = SamplingParams(temperature=0, max_tokens=32)
        for output in llm.generate(PROMPTS, greedy):
            answer = output.outputs[0]
            print(f"{output.prompt!r}: {answer.text!r} ({answer.finish_reason}, {output.num_cached_tokens} tokens cached)")

        # A seed makes draws repeatable: the same text alone, in a batch, and the next time.
        seeded = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=32)
        alone = llm.generate(PROMPTS[0], seeded)[0].outputs[0].text
        together = llm.generate(PROMPTS, seeded)[0].outputs[0].text
        print("same draw alone and in a batch:", alone == together)


if __name__ == "__main__":
    main()
