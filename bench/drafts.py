"""Measure speculative decoding of the bundled model on the CPU, on the kinds of text that it knows.

python bench/drafts.py [--drafts 0 1 2 3 auto] [--batch-size 1 4 16] [--max-tokens 160] [--temperature 0]

With --threads 1 (the default) times are CPU time, which other processes of the machine hardly change.
"""

from __future__ import annotations

import argparse
import statistics
import time

from deltaic import LLM, SamplingParams

STORIES = (
    "Once upon a time",
    "One day, a little girl named Lily found",
    "Tom had a red ball. He liked to",
    "The dog was very happy because",
    "There was a small house in the forest where",
    "In the morning, Mom said",
    "The cat and the bird wanted to",
    "Ben saw a big tree. He",
)
QUESTIONS = (
    "Tell me a story about a brave mouse and a red kite.",
    "What is 7 plus 5?",
    "Repeat after me: silver river lantern bread mountain",
    "Who are you?",
    "What is 12 plus 30?",
    "Tell me a story about a boy and a boat.",
    "What is 9 minus 4?",
    "Repeat after me: green apple window paper cloud",
)
PROMPTS = {
    "stories": STORIES,
    "chats": tuple(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafts", nargs="+", default=["0", "1", "2", "3", "auto"])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", choices=PROMPTS, default="stories")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    clock = time.process_time if args.threads == 1 else time.perf_counter
    print("| batch | drafts | tokens/s | accepted length | accepted by position |\n| --- | --- | --- | --- | --- |")
    for batch_size in args.batch_size:
        for drafts in args.drafts:
            llm = LLM(
                speculative_tokens="auto" if drafts == "auto" else int(drafts),
                device="cpu",
                max_model_len=512,
                max_num_seqs=batch_size,
                enable_prefix_caching=False,
                num_threads=args.threads,
            )
            params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=7)
            texts = PROMPTS[args.prompts]
            prompts = [texts[i % len(texts)] for i in range(max(batch_size, len(texts)))]
            llm.generate(prompts, params)  # warm, and what "auto" measures by
            rates = []
            for _ in range(args.repeat):
                started = clock()
                outputs = llm.generate(prompts, params)
                num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                rates.append(num_tokens / (clock() - started))
            stats = llm.engine.stats().drafts
            shares = [f"{count / max(stats.num_drafts, 1):.2f}" for count in stats.num_accepted_at]
            rate = statistics.median(rates)
            print(f"| {batch_size} | {drafts} | {rate:.0f} | {stats.mean_accepted_length:.2f} | {' '.join(shares)} |")


if __name__ == "__main__":
    main()
