"""``ModelId[Article]``: the primary key of one model, as a payload value.

A row travels as its key, never as itself: what the handler works on is the row as it is
when it runs. No Django model is imported here; the model is looked up when first needed.
"""

from __future__ import annotations

import types
import uuid
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from .exceptions import InvalidHandler, InvalidSubmission

if TYPE_CHECKING:
    from django.db.models import Field, Model

    M = TypeVar("M", bound=Model)
else:
    M = TypeVar("M")

PrimaryKey = int | str | uuid.UUID
INT_MIN, INT_MAX = -(2**63), 2**63 - 1

_bound: dict[Any, type[ModelId[Any]]] = {}


class ModelId(Generic[M]):
    """Carry the primary key of one row of the model in the brackets, and of no other.

    ``ModelId[Article]`` is the type, for annotations. A value is made by
    ``ModelId[Article].of(article)``, ``ModelId[Article](pk)`` or ``ModelId(article)``.
    ``ModelId["shop.Article"]`` names the model before it can be imported.

    Raises ``InvalidSubmission`` for an instance of another model, an unsaved or deleted
    instance, or a key of another type than the model's. Immutable; equal when model and
    key are. It does not promise that the row exists.
    """

    __slots__ = ("pk",)
    _target: ClassVar[Any] = None
    pk: PrimaryKey

    def __class_getitem__(cls, target: Any) -> Any:
        """Give the class bound to ``target``; the same one each time."""
        if isinstance(target, TypeVar):
            return types.GenericAlias(cls, (target,))
        if cls._target is not None:
            raise TypeError(f"{cls.__name__} has its model already")
        return _bound_class(target)

    def __new__(cls, value: PrimaryKey | M) -> ModelId[M]:
        if cls._target is not None:
            return super().__new__(cls)
        if not is_instance(value):
            raise InvalidSubmission(
                "ModelId needs its model: write ModelId[Article](pk) or ModelId(article)."
            )
        return object.__new__(_bound_class(cast("Model", value).__class__))

    def __init__(self, value: PrimaryKey | M) -> None:
        model = self.model_class()
        pk = _pk_of(model, value) if is_instance(value) else value
        object.__setattr__(self, "pk", _checked_pk(model, pk))

    @classmethod
    def of(cls, instance: M) -> ModelId[M]:
        """Give the id of a saved instance; anything else is an ``InvalidSubmission``."""
        if not is_instance(instance):
            raise InvalidSubmission(
                f"ModelId.of() takes a model instance, not {type(instance).__name__}."
            )
        return cls(instance)

    @classmethod
    def from_wire(cls, raw: object) -> ModelId[M]:
        """Read the JSON form back, without coercion; raise ``ValueError`` if it is not one."""
        if _pk_type(cls.model_class()) is uuid.UUID:
            pk = uuid.UUID(raw) if isinstance(raw, str) else None
            if pk is None or str(pk) != raw:
                raise ValueError("expected the text of a UUID")
            return cls(pk)
        try:
            return cls(cast("PrimaryKey", raw))
        except InvalidSubmission as error:
            raise ValueError(str(error)) from None

    @classmethod
    def model_class(cls) -> type[M]:
        """Give the model; ``InvalidHandler`` when no installed app has it."""
        if cls._target is None:
            raise InvalidHandler("ModelId needs its model: write ModelId[Article].")
        target = cls._target
        return cast("type[M]", _model_named(target) if isinstance(target, str) else target)

    @classmethod
    def describe(cls) -> list[str]:
        """Name the model and the type of its key, for the fingerprint."""
        model = cls.model_class()
        return ["model", model._meta.label_lower, _pk_type(model).__name__.lower()]

    @property
    def wire(self) -> int | str:
        """The JSON form: the key itself, a UUID as its text."""
        return str(self.pk) if isinstance(self.pk, uuid.UUID) else self.pk

    def get(self, using: str | None = None) -> M:
        """Read the row with the default manager; raise the model's ``DoesNotExist``."""
        manager = cast("Any", self.model_class())._default_manager
        return cast("M", (manager.using(using) if using else manager).get(pk=self.pk))

    async def aget(self, using: str | None = None) -> M:
        """Do as ``get()``, from async code."""
        manager = cast("Any", self.model_class())._default_manager
        return cast("M", await (manager.using(using) if using else manager).aget(pk=self.pk))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("A ModelId cannot be changed.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("A ModelId cannot be changed.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelId):
            return NotImplemented
        return self.model_class() is other.model_class() and self.pk == other.pk

    def __hash__(self) -> int:
        return hash((self.model_class(), self.pk))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._target, self.pk)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.pk!r})"


def _restore(target: Any, pk: PrimaryKey) -> ModelId[Any]:
    return _bound_class(target)(pk)


def _bound_class(target: Any) -> type[ModelId[Any]]:
    label = _label(target)
    key = label.lower() if isinstance(target, str) else target
    if key not in _bound:
        members = {"_target": target, "__slots__": (), "__module__": ModelId.__module__}
        _bound.setdefault(key, type(f"ModelId[{label}]", (ModelId,), members))
    return _bound[key]


def _label(target: Any) -> str:
    """Give ``app.Model``, or refuse what names no concrete model."""
    if isinstance(target, str):
        if [bool(part) for part in target.split(".")] == [True, True]:
            return target
        raise InvalidHandler('ModelId["..."] takes the text "app_label.ModelName".')
    from django.db.models import Model

    if not (isinstance(target, type) and issubclass(target, Model)):
        raise InvalidHandler("ModelId[...] takes a model class, as in ModelId[Article].")
    if not hasattr(target, "_meta") or target._meta.abstract:
        raise InvalidHandler(
            f"ModelId[{target.__name__}] names an abstract model: name a real one."
        )
    return target._meta.label


def _model_named(label: str) -> type[Model]:
    from django.apps import apps

    try:
        return apps.get_model(label)
    except LookupError:
        raise InvalidHandler(
            f'ModelId["{label}"] names no model of an installed app: check the label.'
        ) from None


def is_instance(value: object) -> bool:
    from django.db.models import Model

    return isinstance(value, Model)


def _pk_of(model: type[Model], value: object) -> Any:
    instance = cast("Model", value)
    given, wanted = instance._meta, model._meta
    if given.concrete_model is not wanted.concrete_model:
        raise InvalidSubmission(f"ModelId[{wanted.label}] was given a {given.label}.")
    if instance.pk is None or instance._state.adding:
        raise InvalidSubmission(f"The {given.label} is not saved: save it before naming its id.")
    return instance.pk


def _pk_type(model: type[Model]) -> type[int] | type[str] | type[uuid.UUID]:
    """Give the Python type of the model's key, seen through one-to-one keys."""
    from django.db import models

    field: Field[Any, Any] = model._meta.pk
    while field.is_relation:
        field = cast("Any", field).target_field
    if isinstance(field, models.UUIDField):
        return uuid.UUID
    if isinstance(field, models.IntegerField):
        return int
    if isinstance(field, models.CharField | models.TextField):
        return str
    raise InvalidHandler(
        f"ModelId[{model._meta.label}] cannot carry a {type(field).__name__}: "
        "only integer, text and UUID primary keys are supported."
    )


def _checked_pk(model: type[Model], pk: Any) -> PrimaryKey:
    wanted = _pk_type(model)
    if not isinstance(pk, wanted) or isinstance(pk, bool):
        raise InvalidSubmission(
            f"ModelId[{model._meta.label}] takes a key of type {wanted.__name__}, "
            f"not {type(pk).__name__}."
        )
    if isinstance(pk, int) and not INT_MIN <= pk <= INT_MAX:
        raise InvalidSubmission(f"The key of ModelId[{model._meta.label}] is beyond 64 bits.")
    if isinstance(pk, str) and not _is_storable(pk):
        raise InvalidSubmission(
            f"The key of ModelId[{model._meta.label}] holds NUL or a lone surrogate."
        )
    return pk


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
