"""What the shop does when asked: each function is one transaction.

Business row, outbox row and job are written together. If the transaction is
rolled back, none of them ever existed; if it commits, the worker will run the
job, also when this process dies in the next moment.
"""

import hashlib

from django.db import transaction
from django_durable_jobs import ModelId

from shop import jobs
from shop.models import InboxMessage, Order, OutboxMessage, Payment


class MessageMismatchError(Exception):
    """A known message id came with other content."""


def place_order(*, customer, product, quantity):
    """Take an order. Give the order; its confirmation follows in a job."""
    with transaction.atomic():
        order = Order.objects.create(
            customer=customer,
            product=product,
            quantity=quantity,
            total_cents=quantity * product.price_cents,
        )
        add_to_outbox("order.placed", {"order": str(order.reference)})
        jobs.confirm_order.stage(
            jobs.ConfirmOrder(order=ModelId(order)),
            job_id=f"confirm-{order.reference}",
        )
    return order


def receive_payment(*, message_id, raw_body, order, amount_cents):
    """Take a payment message. Give whether it was new (False: delivered again).

    The inbox row decides. The job id does not: it would only keep the *job* from
    being made twice, and say nothing about the payment and the outbox row.
    """
    body_sha256 = hashlib.sha256(raw_body).hexdigest()
    with transaction.atomic():
        message, is_new = InboxMessage.objects.get_or_create(
            source="payments",
            message_id=message_id,
            defaults={"body_sha256": body_sha256},
        )
        if message.body_sha256 != body_sha256:
            raise MessageMismatchError
        if not is_new:
            return False
        payment = Payment.objects.create(
            order=order, message_id=message_id, amount_cents=amount_cents
        )
        add_to_outbox("payment.received", {"order": str(order.reference)})
        jobs.book_payment.stage(
            jobs.BookPayment(payment=ModelId(payment)),
            job_id=f"book-{message_id}",
        )
    return True


def add_to_outbox(topic, body):
    """Write a message for the outside, and the job that relays it.

    The caller's transaction must be open: message and job commit with its rows.
    """
    message = OutboxMessage.objects.create(topic=topic, body=body)
    jobs.relay_outbox.stage(
        jobs.RelayMessage(message=ModelId(message)),
        job_id=f"relay-{message.message_id}",
    )
    return message


def start_import(*, source="", pause_seconds=0.0):
    """Start the import, or give the one that is live (`newly_created` False)."""
    return jobs.import_airports.enqueue(
        jobs.ImportAirports(source=source, pause_seconds=pause_seconds),
        dedupe_key="airports",
    )
