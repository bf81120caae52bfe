"""Streams the answer to one message as it is made.

python examples/stream_chat.py "What is the capital of France?"
"""

import sys

from deepinfer import LLM, SamplingParams


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"
    with LLM("smollm2") as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": question}])
        for output in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=128)):
            for answer in output.outputs:  # each holds only what is new
                print(answer.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
