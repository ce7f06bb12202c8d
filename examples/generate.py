"""Generate text with the bundled model, whole and streamed."""

from deltaic import LLM, SamplingParams


def main() -> None:
    llm = LLM()
    params = SamplingParams(temperature=0.0, max_tokens=40)
    for output in llm.generate(["Once upon a time", "The old man looked at the sea and"], params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

    print("chat:", llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)[0].outputs[0].text)

    for delta in llm.stream("There was a small dog", params):
        print(delta, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
