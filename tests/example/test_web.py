"""Orders and payment messages through the shop's own doors."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from .shop import JOB, Answer, Browser, Shop, open_shop

WEBHOOK = "/webhooks/payments/"
SECRET = "a secret of this test"
TABLES = ["shop_order", "shop_payment", "shop_inboxmessage", "shop_outboxmessage", JOB]


@pytest.fixture
def shop(shop: Shop) -> Shop:
    shop.environment["SHOP_WEBHOOK_SECRET"] = SECRET
    return shop


def counts(shop: Shop) -> dict[str, int]:
    return {table: shop.count(table) for table in TABLES}


def deliver(browser: Browser, body: Any, secret: str = SECRET) -> Answer:
    text = body if isinstance(body, str) else json.dumps(body)
    headers = {"Content-Type": "application/json", "X-Webhook-Secret": secret}
    return browser.ask("POST", WEBHOOK, text, headers)


def place_order(shop: Shop, browser: Browser, **fields: str) -> str:
    """Order through the page; give the reference."""
    tea = str(shop.value("SELECT id FROM shop_product WHERE sku = 'TEA-01'"))
    answer = browser.submit("/", **{"customer": "Ada", "product": tea, "quantity": "2", **fields})
    assert (answer.status, answer.location) == (302, "/orders/")
    newest = shop.value("SELECT reference FROM shop_order ORDER BY id DESC LIMIT 1")
    return str(uuid.UUID(str(newest)))


def handlers(shop: Shop) -> list[tuple[str, str]]:
    return shop.rows(f"SELECT handler, status FROM {JOB} ORDER BY handler")


def test_an_order_and_a_message_delivered_twice_have_one_effect_each(shop: Shop) -> None:
    with open_shop(shop) as browser:
        reference = place_order(shop, browser)
        assert "Ada" in browser.get("/orders/").text
        job_id = f"confirm-{reference}"
        assert shop.value(f"SELECT status FROM {JOB} WHERE job_id = '{job_id}'") == "queued"
        after_order = counts(shop)
        assert list(after_order.values()) == [1, 0, 0, 1, 2]

        # What is no order leaves nothing.
        refused = browser.submit("/", customer="Bob", product="0", quantity="0")
        assert refused.status == 200
        assert counts(shop) == after_order

        message = {"message_id": "m-1", "order": reference, "amount_cents": 1380}
        assert deliver(browser, message, secret="wrong").status == 403
        assert deliver(browser, message, secret="").status == 403
        assert deliver(browser, "{").status == 400
        assert deliver(browser, "[1]").status == 400
        assert deliver(browser, "[" * 9_000).status == 400
        assert deliver(browser, {**message, "amount_cents": -1}).status == 400
        assert deliver(browser, {**message, "order": str(uuid.uuid4())}).status == 404
        assert browser.get(WEBHOOK).status == 405
        assert counts(shop) == after_order

        answers = [deliver(browser, message) for _ in range(3)]
        assert [answer.status for answer in answers] == [201, 200, 200]
        assert [answer.json()["new"] for answer in answers] == [True, False, False]
        once = counts(shop)
        assert list(once.values()) == [1, 1, 1, 2, 4]
        assert deliver(browser, {**message, "amount_cents": 1}).status == 409
        assert counts(shop) == once

        worker = shop.work("--drain")
        assert worker.ends() == 0, worker.output()
        # Delivered again after its job has ended: still the same message.
        assert deliver(browser, message).status == 200
        assert counts(shop) == once
        assert "Confirmed and paid" in browser.get("/orders/").text

    assert handlers(shop) == [
        ("shop.book_payment", "succeeded"),
        ("shop.confirm_order", "succeeded"),
        ("shop.relay_outbox", "succeeded"),
        ("shop.relay_outbox", "succeeded"),
    ]
    assert shop.row("SELECT confirmations, total_cents FROM shop_order") == (1, 1380)
    assert shop.row("SELECT bookings, amount_cents FROM shop_payment") == (1, 1380)
    sent = "SELECT message_id, topic FROM shop_sentmessage ORDER BY topic"
    outbox = "SELECT message_id, topic FROM shop_outboxmessage ORDER BY topic"
    assert shop.rows(sent) == shop.rows(outbox)
    assert shop.value("SELECT count(*) FROM shop_outboxmessage WHERE sent_at IS NULL") == 0


def test_a_rollback_leaves_nothing(shop: Shop) -> None:
    with open_shop(shop) as browser:
        reference = place_order(shop, browser)
        # Another request has taken the id of the booking's job: the last write of the webhook's
        # transaction is refused, after its inbox row, payment and message were written.
        taken = "from shop.jobs import flaky\nflaky.submit(job_id='book-m-2')"
        shop.python(taken)
        before = counts(shop)
        message = {"message_id": "m-2", "order": reference, "amount_cents": 5}
        assert deliver(browser, message).status == 500
        assert counts(shop) == before
        assert shop.count("shop_inboxmessage") == 0

        shop.python(
            "from django.db import transaction\n"
            "from shop import models, services\n"
            "try:\n"
            "    with transaction.atomic():\n"
            "        product = models.Product.objects.first()\n"
            "        services.place_order(customer='Nobody', product=product, quantity=1)\n"
            "        assert models.OutboxMessage.objects.count() == 2\n"
            "        raise ZeroDivisionError\n"
            "except ZeroDivisionError:\n"
            "    pass\n"
        )
        assert counts(shop) == before
        # The shop goes on.
        place_order(shop, browser)
        assert shop.count("shop_order") == 2
