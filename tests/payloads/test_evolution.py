"""The recipes of docs/payloads.md for a payload that changes, each run as it stands there."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from django_durable_jobs import JobContext, job, states
from django_durable_jobs.handlers import registry
from django_durable_jobs.models import Job
from django_durable_jobs.testing import drain

pytestmark = pytest.mark.django_db
PAGE = Path(__file__).parents[2].joinpath("docs", "payloads.md").read_text()
GIVEN = {"dataclass": dataclass, "job": job, "JobContext": JobContext, "Job": Job, "states": states}


def blocks(title: str) -> list[str]:
    """Give the code under a title of the page."""
    _, found, rest = PAGE.partition(f"\n### {title}\n")
    assert found, title
    return re.findall(r"```python\n(.*?)```", re.split(r"\n##+ ", rest)[0], re.DOTALL)


def module(code: str) -> Any:
    """Run code as a module of its own, as a release of the project does."""
    made = types.ModuleType(f"tests.release_{len(sys.modules)}")
    sys.modules[made.__name__] = made
    vars(made).update(GIVEN)
    exec(compile(code, made.__name__, "exec"), vars(made))  # noqa: S102
    return made


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = set(sys.modules)
    with registry.temporary():
        yield
    for name in set(sys.modules) - before:
        if name.startswith("tests.release_"):
            del sys.modules[name]


def deploy(title: str, name: str) -> tuple[Any, Any]:
    """Have jobs of the release before, and then the release after."""
    before, after = blocks(title)
    with registry.temporary():
        old = module(before)
        handler = registry.resolve(name)
        waiting = [handler.submit(payload) for payload in OLD_PAYLOADS[name](old)]
    new = module(after)
    return waiting, new


OLD_PAYLOADS: dict[str, Any] = {
    "shop.ship": lambda old: [old.Ship(1), old.Ship(2)],
    "shop.charge": lambda old: [old.Charge(2.5)],
    "shop.notify": lambda old: [old.Notify("ann@example.com")],
}


def results(jobs: list[Job]) -> list[Any]:
    return [Job.objects.get(pk=one.pk).result for one in jobs]


def run() -> None:
    drain()
    assert set(Job.objects.values_list("status", "attempt_count")) == {("succeeded", 1)}


def test_a_new_field_with_a_default() -> None:
    waiting, new = deploy("A new field with a default", "shop.ship")
    fresh = [Job.objects.submit("shop.ship", new.Ship(3, "rail")), new.ship.submit(new.Ship(4))]
    run()
    assert results(waiting) == ["1 by post", "2 by post"]
    assert results(fresh) == ["3 by rail", "4 by post"]
    assert [one.handler_version for one in [*waiting, *fresh]] == [1, 1, 2, 2]


def test_another_meaning() -> None:
    waiting, new = deploy("Another meaning", "shop.charge")
    fresh = [
        new.charge.submit(new.Charge(cents=250, currency="EUR")),
        Job.objects.submit(("shop.charge", 1), new.ChargeV1(7)),
    ]
    run()
    assert results(waiting) == ["2.50 euros"]
    assert results(fresh) == ["250 cents of EUR", "7.00 euros"]


def test_an_upgrade_function_over_several_versions() -> None:
    waiting, new = deploy("An upgrade function, over several versions", "shop.notify")
    fresh = [
        Job.objects.submit("shop.notify", new.Notify({"bob": "b@example.com"})),
        Job.objects.submit(("shop.notify", 2), new.NotifyV2(["c@x.org", "d@x.org"])),
    ]
    run()
    assert results(waiting) == ["ann <ann@example.com>"]
    assert results(fresh) == ["bob <b@example.com>", "c <c@x.org>, d <d@x.org>"]


def test_when_the_old_version_can_go() -> None:
    waiting, new = deploy("A new field with a default", "shop.ship")
    is_needed = module(blocks("When the old version can go")[0]).is_needed
    assert is_needed("shop.ship", 1)
    assert not is_needed("shop.ship", 2)
    run()
    assert not is_needed("shop.ship", 1)


def test_a_schema_that_was_changed_without_a_new_version() -> None:
    before, after = blocks("A new field with a default")
    faulty = before.replace("order: int", "order: int\n    carrier: str = 'post'")
    with registry.temporary():
        waiting = module(before).ship.submit(module_payload("Ship", 1))
    with registry.temporary():
        between = module(faulty).ship.submit(module_payload("Ship", 2))
        drain()
    assert Job.objects.get(pk=waiting.pk).blocked_reason == "schema_mismatch"
    assert Job.objects.get(pk=between.pk).status == "succeeded"
    with registry.temporary():
        lost = module(faulty).ship.submit(module_payload("Ship", 3))
    with registry.temporary():
        module(after)
        drain()
        assert results([waiting]) == ["1 by post"]
        assert Job.objects.get(pk=lost.pk).blocked_reason == "schema_mismatch"
    with registry.temporary():
        module(faulty)
        drain()
    run()


def module_payload(name: str, *values: Any) -> Any:
    """Make a payload of the module that was run last."""
    last = [one for one in sys.modules if one.startswith("tests.release_")][-1]
    return getattr(sys.modules[last], name)(*values)
