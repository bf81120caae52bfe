"""Serves several callers at once from one event loop: their requests share the running batch, and one of them leaves early.

    python examples/serve_async.py

The engine runs in a process of its own; this one makes text and never holds it up.
"""

import asyncio
from contextlib import aclosing

from deepinfer import AsyncLLM, SamplingParams


async def caller(llm: AsyncLLM, name: str, question: str, patience: int | None = None) -> None:
    """Asks one question; with ``patience``, leaves after so many tokens."""
    text = ""
    greedy = SamplingParams(temperature=0, max_tokens=48)
    # Leaving the block closes the iterator, which aborts what is unfinished and gives its blocks back.
    async with aclosing(llm.chat([{"role": "user", "content": question}], greedy)) as outputs:
        async for output in outputs:
            text = output.outputs[0].text
            if patience is not None and len(output.outputs[0].token_ids) >= patience:
                break
    print(f"{name}: {text!r}")


async def main() -> None:
    async with AsyncLLM("smollm2") as llm:
        await asyncio.gather(
            caller(llm, "ann", "What is the capital of France?"),
            caller(llm, "bob", "Write one sentence about the sea."),
            caller(llm, "cat", "Count from one to twenty.", patience=5),
        )


if __name__ == "__main__":
    asyncio.run(main())
