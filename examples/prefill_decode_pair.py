"""One model in two processes: one computes prompts, the other what follows, so that nobody's long prompt holds up an answer.

    python examples/prefill_decode_pair.py

KV goes from one to the other through shared memory (``kv_transfer="tcp"``: over a socket). The answers are those of one engine.
"""

import asyncio

from deepinfer import PrefillDecodePair, SamplingParams


async def answer(pair: PrefillDecodePair, question: str) -> str:
    """Asks one question."""
    params = SamplingParams(temperature=0, max_tokens=32)
    outputs = [output async for output in pair.chat([{"role": "user", "content": question}], params, mode="final")]
    return outputs[-1].outputs[0].text


async def main() -> None:
    questions = ["What is the capital of France?", "Write one sentence about the sea."]
    async with PrefillDecodePair("smollm2", num_kv_blocks=64) as pair:
        for question, text in zip(questions, await asyncio.gather(*(answer(pair, q) for q in questions)), strict=True):
            print(f"{question} {text!r}")


if __name__ == "__main__":
    asyncio.run(main())
