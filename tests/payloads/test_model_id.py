"""``ModelId``: the key of one model and of no other (CONTRACT 2.2)."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import typing
import uuid
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.contrib.sessions.models import Session
from django.db import models

from django_durable_jobs.exceptions import InvalidHandler, InvalidSubmission
from django_durable_jobs.payloads import (
    JSON,
    CorruptPayload,
    ModelId,
    NotStorable,
    codec_for,
    encode_result,
)

from .kinds import (
    LIMIT,
    Article,
    Base,
    Cover,
    Magazine,
    Odd,
    Publication,
    SpecialUser,
    T,
    fingerprint,
    refused,
    round_trip,
    saved,
)


def test_a_model_id_is_made_from_an_instance_or_a_key() -> None:
    user = saved(User(pk=5))
    made = [ModelId[User].of(user), ModelId[User](5), ModelId[User](user), ModelId(user)]
    assert set(made) == {ModelId[User](5)}
    assert made[0].pk == 5
    assert made[0].model_class() is User
    assert repr(made[0]) == "ModelId[auth.User](5)"
    assert ModelId.of(user) == made[0]
    assert ModelId["auth.User"](5) == made[0]
    assert made[0] != ModelId[Group](5)
    assert made[0] != 5


def test_the_bound_class_is_one_and_the_same() -> None:
    assert ModelId[User] is ModelId[User]
    assert ModelId["auth.User"] is ModelId["auth.user"]
    assert isinstance(ModelId[User](5), ModelId[User])
    with pytest.raises(TypeError):
        ModelId[User][Group]
    assert typing.get_args(ModelId[T]) == (T,)


@pytest.mark.parametrize(
    ("hint", "value", "says"),
    [
        (ModelId[User], saved(Group(pk=5)), "was given a auth.Group"),
        (ModelId[User], User(pk=5), "not saved"),
        (ModelId[User], saved(User()), "not saved"),
        (ModelId[Article], Article(), "not saved"),
        (ModelId[User], "5", "type int, not str"),
        (ModelId[User], True, "type int, not bool"),
        (ModelId[User], None, "type int, not NoneType"),
        (ModelId[User], 2**63, "64 bits"),
        (ModelId[Session], 5, "type str"),
        (ModelId[Session], "a\0", "NUL"),
        (ModelId[Session], "\ud800", "surrogate"),
        (ModelId[Article], str(uuid.UUID(int=1)), "type UUID, not str"),
        (ModelId, 5, "needs its model"),
    ],
)
def test_a_key_that_is_not_the_models_is_refused(hint: Any, value: Any, says: str) -> None:
    with pytest.raises(InvalidSubmission, match=says):
        hint(value)


def test_of_takes_instances_only() -> None:
    with pytest.raises(InvalidSubmission, match="takes a model instance, not int"):
        ModelId[User].of(typing.cast("User", 5))


@pytest.mark.parametrize(
    ("target", "says"),
    [(int, "takes a model class"), (5, "takes a model class"), (Base, "abstract"),
     (models.Model, "abstract"), ("Article", "app_label"), ("a.b.c", "app_label"), (".", "app_")],
)  # fmt: skip
def test_what_is_no_model_is_refused_in_the_brackets(target: Any, says: str) -> None:
    with pytest.raises(InvalidHandler, match=says):
        ModelId[target]


def test_a_model_that_no_app_has_is_found_when_it_is_needed() -> None:
    codec = codec_for(ModelId["shop.Nothing"])
    with pytest.raises(InvalidHandler, match="no model of an installed app"):
        _ = codec.fingerprint
    with pytest.raises(InvalidHandler, match="DateField"):
        _ = codec_for(ModelId[Odd]).fingerprint
    with pytest.raises(InvalidHandler, match="needs its model"):
        ModelId.model_class()


def test_the_wire_form_is_the_key() -> None:
    key = uuid.UUID(int=5)
    for hint, pk, text in [
        (ModelId[User], 5, "5"),
        (ModelId[Session], "abc", '"abc"'),
        (ModelId[Article], key, f'"{key}"'),
        (ModelId[Cover], key, f'"{key}"'),
    ]:
        codec = codec_for(hint)
        assert codec.encode(hint(pk)) == text
        assert codec.decode(text) == hint(pk)
        assert type(codec.decode(text)) is hint
    assert encode_result({"id": ModelId[Article](key)}, LIMIT) == f'{{"id":"{key}"}}'


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (ModelId[User], '"5"'),
        (ModelId[User], "5.0"),
        (ModelId[User], "true"),
        (ModelId[User], "null"),
        (ModelId[Session], "5"),
        (ModelId[Article], "5"),
        (ModelId[Article], '"5"'),
        (ModelId[Article], '"00000000000000000000000000000005"'),
    ],
)
def test_a_stored_key_of_another_type_is_corrupt(hint: Any, text: str) -> None:
    with pytest.raises(CorruptPayload):
        codec_for(hint).decode(text)


def test_a_payload_holds_the_id_of_that_model_and_no_other() -> None:
    @dataclasses.dataclass
    class Publish:
        user: ModelId[User]

    assert round_trip(Publish, Publish(ModelId(saved(User(pk=5))))).user.pk == 5
    assert "expected ModelId[auth.User]" in refused(Publish, Publish(ModelId[Group](5)))
    assert "expected ModelId[auth.User], got int: write ModelId[User](pk)" in refused(
        Publish, Publish(typing.cast("Any", 5))
    )
    assert round_trip(ModelId["auth.User"], ModelId[User](5)).pk == 5


def test_an_instance_in_a_payload_becomes_its_id() -> None:
    @dataclasses.dataclass
    class Publish:
        article: ModelId[Article]
        author: ModelId[User] | None = None

    key = uuid.UUID(int=5)
    given: Any = Publish(saved(Article(pk=key)), saved(SpecialUser(pk=7)))  # type: ignore[arg-type]
    codec = codec_for(Publish)
    assert codec.encode(given) == f'{{"article":"{key}","author":7}}'
    assert codec.decode(codec.encode(given)) == Publish(ModelId[Article](key), ModelId[User](7))
    assert codec_for(ModelId[User]).encode(saved(User(pk=7))) == "7"
    assert codec_for(list[ModelId[Session]]).encode([saved(Session(pk="a"))]) == '["a"]'
    for author, says in [
        (saved(Group(pk=7)), "expected ModelId[auth.User], got Group"),
        (User(pk=7), "The auth.User is not saved"),
        (saved(User(pk=2**63)), "beyond 64 bits"),
    ]:
        assert says in refused(Publish, Publish(saved(Article(pk=key)), author))


@pytest.mark.parametrize("hint", [JSON, int, dict[str, int], str])
def test_an_instance_stands_for_nothing_else(hint: Any) -> None:
    value: Any = saved(User(pk=7))
    given = {"a": value} if typing.get_origin(hint) is dict else value
    assert "User" in refused(hint, given)
    with pytest.raises(NotStorable, match="User is not a JSON type"):
        encode_result(value, LIMIT)


def test_a_proxy_names_the_same_row() -> None:
    assert ModelId[User].of(saved(SpecialUser(pk=5))).pk == 5
    assert ModelId[SpecialUser].of(saved(User(pk=5))).pk == 5
    assert "ModelId[auth.User]" in refused(ModelId[User], ModelId[SpecialUser](5))


def test_a_child_of_another_table_is_another_row() -> None:
    """Multi-table inheritance: each table has its rows, though the keys are equal."""
    child = saved(Magazine(pk=5))
    assert ModelId[Magazine].of(child).pk == 5
    assert ModelId[Publication](5) != ModelId[Magazine](5)
    for hint, instance in [
        (ModelId[Publication], child),
        (ModelId[Magazine], saved(Publication(pk=5))),
    ]:
        with pytest.raises(InvalidSubmission, match="was given a"):
            hint.of(instance)
        assert "expected ModelId" in refused(hint, instance)
    assert fingerprint(ModelId[Publication]) != fingerprint(ModelId[Magazine])


def test_a_model_id_cannot_be_changed_and_can_be_copied() -> None:
    made = ModelId[User](5)
    with pytest.raises(AttributeError):
        made.pk = 6
    with pytest.raises(AttributeError):
        del made.pk
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made))  # noqa: S301


def test_get_reads_with_the_default_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Manager:
        def using(self, alias: str) -> Manager:
            calls.append(alias)
            return self

        def get(self, *, pk: int) -> str:
            return f"row {pk}"

        async def aget(self, *, pk: int) -> str:
            return f"row {pk}"

    monkeypatch.setitem(vars(User._meta), "default_manager", Manager())
    made: Any = ModelId[User](5)
    assert made.get() == "row 5"
    assert made.get(using="other") == "row 5"
    for options in ({}, {"using": "other"}):
        with pytest.raises(StopIteration) as stopped:
            made.aget(**options).send(None)
        assert stopped.value.value == "row 5"
    assert calls == ["other", "other"]
