from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.core.types import TokenKind
from cadenza.tokens import BrokenCall, Call, Final

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
line = text.map(lambda s: s.replace("\n", " "))
think = st.none() | text
actions = st.builds(
    Call, st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True), line, st.none() | text, think
) | st.builds(Final, text, think)
ids = st.lists(st.integers(0, 20) | st.integers(-3, 3000), max_size=40)


@settings(deadline=None)
@given(action=actions)
def test_an_action_survives_rendering_and_parsing(renderer, action):
    sampled = renderer.render_action(action)
    assert renderer.parse(sampled).action == action
    assert renderer.turn_ends(sampled)
    assert not any(renderer.turn_ends(sampled[:n]) for n in range(len(sampled)))


@settings(deadline=None)
@given(sampled=ids)
def test_random_ids_are_parsed_or_typed_and_kinds_align(renderer, sampled):
    parsed = renderer.parse(sampled)
    assert isinstance(parsed.action, (Call, Final, BrokenCall))
    kinds = renderer.kinds_of_sampled(sampled)
    assert len(kinds) == len(sampled)
    assert set(kinds) <= {TokenKind.THINK, TokenKind.CALL, TokenKind.FINAL}
    assert isinstance(renderer.turn_ends(sampled), bool)


@settings(deadline=None)
@given(text=text)
def test_rendered_parts_align_with_their_kinds(renderer, text):
    for (part, kinds), kind, names in (
        (renderer.render_prompt(text), TokenKind.OTHER, "<|bos|><|user|>"),
        (renderer.render_output(text), TokenKind.OUTPUT, "<|output|>"),
    ):
        assert len(part) == len(kinds) and set(kinds) == {kind}
        assert renderer.tokenizer.decode(part) == f"{names}{text}<|end|>"


def test_kinds_follow_the_parts_of_a_turn(renderer):
    sampled = renderer.render_action(Call("grep", "x", think="h"))
    kinds = renderer.kinds_of_sampled(sampled)
    cut = sampled.index(renderer.end_id) + 1
    assert set(kinds[:cut]) == {TokenKind.THINK} and set(kinds[cut:]) == {TokenKind.CALL}


def broken(renderer, ids):
    action = renderer.parse(ids).action
    assert isinstance(action, BrokenCall), action
    return action.kind


def test_each_broken_turn_has_its_kind(renderer):
    t = renderer.tokenizer
    call, end, think = t.id("<|call|>"), t.id("<|end|>"), t.id("<|think|>")
    word = t.encode("grep")
    assert broken(renderer, []) == "no_role"
    assert broken(renderer, word) == "no_role"
    assert broken(renderer, [end]) == "no_role"
    assert broken(renderer, [call, *word]) == "no_end"
    assert broken(renderer, [think, *word]) == "no_end"
    assert broken(renderer, [think, end]) == "no_role"
    assert broken(renderer, [think, end, think, end, call, *word, end]) == "two_thoughts"
    assert broken(renderer, [call, *word, end, *word]) == "trailing"
    assert broken(renderer, [call, *word, call, end]) == "stray_special"
    assert broken(renderer, [call, *t.encode("é")[:1], end]) == "not_utf8"
    assert broken(renderer, [call, 999_999, end]) == "not_utf8"
    assert broken(renderer, [call, end]) == "bad_name"
    assert broken(renderer, [call, *t.encode("Grep x"), end]) == "bad_name"
    assert broken(renderer, [call, *t.encode('{"cmd": "ls'), end]) == "bad_name"
