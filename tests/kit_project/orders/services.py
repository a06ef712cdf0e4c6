from datetime import timedelta

from django.db import transaction

from .jobs import Confirm, confirm, remind
from .models import Order


def place_order(reference: str, email: str) -> Order:
    """Store the order; its two jobs commit or roll back with it."""
    with transaction.atomic():
        order = Order.objects.create(reference=reference, email=email)
        confirm.stage(Confirm(reference=reference), job_id=f"confirm-{reference}")
        remind.stage(Confirm(reference=reference), run_at=timedelta(days=7))
        if "@" not in email:
            raise ValueError("an order needs an address")
    return order
