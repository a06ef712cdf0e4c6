"""The shop's tables: what it sells, what it received, what it has to send.

Three of them carry the recipe of this example:

- `OutboxMessage`: a message to the outside, written in the transaction of the
  business row that it tells of. So neither exists without the other.
- `InboxMessage`: a message from the outside, unique by its sender's id. So one
  that is delivered twice has one effect.
- `SentMessage`: the outside itself. It stands in for a mail server or a broker.
"""

import uuid

from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone


def euros(cents):
    return f"€{cents // 100:,}.{cents % 100:02d}"


class Product(models.Model):
    sku = models.CharField(max_length=20, unique=True)
    name = models.CharField(max_length=100)
    price_cents = models.PositiveIntegerField()

    class Meta:
        ordering = ["name"]

    def __str__(self):
        return f"{self.name} ({self.price})"

    @property
    def price(self):
        return euros(self.price_cents)


class Order(models.Model):
    reference = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    customer = models.CharField(max_length=100)
    product = models.ForeignKey(Product, on_delete=models.PROTECT)
    quantity = models.PositiveSmallIntegerField(validators=[MinValueValidator(1)])
    total_cents = models.PositiveIntegerField()
    created_at = models.DateTimeField(default=timezone.now)
    confirmed_at = models.DateTimeField(null=True, blank=True)
    # How often a confirmation took effect. It never exceeds 1: that is the
    # promise which the demo proves.
    confirmations = models.PositiveSmallIntegerField(default=0)
    paid_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at", "-pk"]

    def __str__(self):
        return f"Order {self.short_reference}"

    @property
    def short_reference(self):
        return str(self.reference)[:8]

    @property
    def total(self):
        return euros(self.total_cents)

    @property
    def state(self):
        if self.confirmed_at is None:
            return "Waiting for confirmation"
        return "Confirmed and paid" if self.paid_at else "Confirmed"


class Payment(models.Model):
    """What one payment message did. Booked by its job, never by the view."""

    order = models.ForeignKey(Order, on_delete=models.PROTECT, related_name="payments")
    message_id = models.CharField(max_length=100)
    amount_cents = models.PositiveIntegerField()
    booked_at = models.DateTimeField(null=True, blank=True)
    bookings = models.PositiveSmallIntegerField(default=0)

    def __str__(self):
        return f"{euros(self.amount_cents)} for {self.order}"


class Account(models.Model):
    """A customer's credit. Deposits are added by their job, each of them once."""

    customer = models.CharField(max_length=100, unique=True)
    balance_cents = models.PositiveIntegerField(default=0)

    def __str__(self):
        return f"{self.customer}: {euros(self.balance_cents)}"


class InboxMessage(models.Model):
    source = models.CharField(max_length=50)
    message_id = models.CharField(max_length=100)
    body_sha256 = models.CharField(max_length=64)
    received_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["source", "message_id"], name="shop_inbox_message_once")
        ]

    def __str__(self):
        return f"{self.source} {self.message_id}"


class OutboxMessage(models.Model):
    message_id = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    topic = models.CharField(max_length=50)
    body = models.JSONField()
    created_at = models.DateTimeField(default=timezone.now)
    sent_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [
            models.Index(
                fields=["id"],
                name="shop_outbox_unsent",
                condition=models.Q(sent_at__isnull=True),
            )
        ]

    def __str__(self):
        return f"{self.topic} {self.message_id}"


class SentMessage(models.Model):
    """The outside world's log. No unique id: it keeps what it is given."""

    message_id = models.UUIDField()
    topic = models.CharField(max_length=50)
    body = models.JSONField()
    received_at = models.DateTimeField(default=timezone.now)

    def __str__(self):
        return f"{self.topic} {self.message_id}"


class Airport(models.Model):
    """A place the shop ships to, imported from a CSV file."""

    code = models.CharField(max_length=10, unique=True)
    iata = models.CharField(max_length=3, blank=True)
    name = models.CharField(max_length=200)
    city = models.CharField(max_length=200, blank=True)
    country = models.CharField(max_length=2)
    latitude = models.FloatField()
    longitude = models.FloatField()

    class Meta:
        ordering = ["code"]

    def __str__(self):
        return f"{self.code} {self.name}"


class ImportedChunk(models.Model):
    """Evidence that a part of a file was imported, and by which attempt.

    Written beside the chunk's airports and the checkpoint. A chunk that came
    twice would break the constraint, and so the job: nothing is passed over.
    """

    job_id = models.CharField(max_length=200)
    first_row = models.PositiveIntegerField()
    rows = models.PositiveIntegerField()
    attempt = models.PositiveIntegerField()

    class Meta:
        ordering = ["job_id", "first_row"]
        constraints = [
            models.UniqueConstraint(fields=["job_id", "first_row"], name="shop_chunk_imported_once")
        ]

    def __str__(self):
        return f"{self.job_id}: {self.rows} rows from row {self.first_row}"
