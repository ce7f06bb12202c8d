"""What a model thinks, told apart from what it says."""

from __future__ import annotations

_OPEN, _CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Split a growing text at <think> and </think>.

    Reasoning is what stands between the two when the text begins with <think>, or from the start when the prompt
    opened it. White space around either part is dropped. What feed and the last end return, concatenated, does not
    depend on how the text is cut into pieces.
    """

    def __init__(self, *, opened: bool, until: str | None = None) -> None:
        """Take whether the prompt opened the reasoning, and a tag that ends it too and begins the content."""
        self._ends = [_CLOSE] if until is None else [_CLOSE, until]
        self._in_reasoning = opened
        self._may_open = not opened
        self._after_close = False
        self._started = False  # some of the current part was returned
        self._held = ""  # may belong to a tag, or to the white space before one

    @property
    def in_reasoning(self) -> bool:
        return self._in_reasoning

    def feed(self, text: str) -> tuple[str, str]:
        """Take a piece; return what it adds to the reasoning and to the content."""
        self._held += text
        reasoning = content = ""
        if self._may_open:
            begun = self._held.lstrip()
            if begun.startswith(_OPEN):
                self._in_reasoning, self._may_open, self._held = True, False, begun[len(_OPEN) :]
            elif _OPEN.startswith(begun):
                return "", ""
            else:
                self._may_open = False
        if self._in_reasoning:
            found = [(start, tag) for tag in self._ends if (start := self._held.find(tag)) >= 0]
            if found:
                end, tag = min(found)
                reasoning = self._take_reasoning(self._held[:end].rstrip())
                self._held = self._held[end + (len(_CLOSE) if tag == _CLOSE else 0) :]
                self._in_reasoning, self._after_close, self._started = False, True, False
            else:
                num_held = max(num_open_chars(self._held, tag) for tag in self._ends)
                safe = self._held[: len(self._held) - num_held].rstrip()
                reasoning = self._take_reasoning(safe)
                self._held = self._held[len(safe) :]
                return reasoning, ""
        if self._after_close and not self._started:
            self._held = self._held.lstrip()
        content, self._held = self._held, ""
        self._started = self._started or bool(content)
        return reasoning, content

    def _take_reasoning(self, text: str) -> str:
        taken = text if self._started else text.lstrip()
        self._started = self._started or bool(taken)
        return taken

    def end(self) -> tuple[str, str]:
        """Return what was held back; the text has ended."""
        held, self._held = self._held, ""
        if self._in_reasoning:
            return self._take_reasoning(held.rstrip()), ""
        return "", held


def num_open_chars(text: str, tag: str) -> int:
    """Return how many of the last characters may be the start of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def opens_reasoning(prompt: str, continued: str) -> bool:
    """Return whether a prompt leaves the model within its reasoning; `continued` is the part that it said itself."""
    return prompt.rstrip().endswith(_OPEN) or continued.rfind(_OPEN) > continued.rfind(_CLOSE)
