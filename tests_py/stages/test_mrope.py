from __future__ import annotations

from typing import Any

from deltaic.stages.mrope import filter_position_arguments

ARGUMENTS = {"input_tokens": [1], "image_grid_thw": 2, "audio_lengths": 3, "self": 4, "other": 5}


class Model:
    def positions(self, input_tokens: Any, image_grid_thw: Any, *, audio_lengths: Any = None) -> None: ...

    def any_positions(self, input_tokens: Any, **rest: Any) -> None: ...


def test_g1_a_position_function_gets_the_arguments_that_it_names() -> None:
    for function in (Model().positions, Model.positions):
        assert filter_position_arguments(function, ARGUMENTS) == {"image_grid_thw": 2, "audio_lengths": 3}


def test_g2_a_function_of_any_keyword_gets_the_same_object() -> None:
    assert filter_position_arguments(Model().any_positions, ARGUMENTS) is ARGUMENTS


def test_g2_an_unreadable_signature_gets_the_same_object() -> None:
    class Opaque:
        __signature__ = "unreadable"

        def __call__(self) -> None: ...

    assert filter_position_arguments(Opaque(), ARGUMENTS) is ARGUMENTS
