"""The door for messages of the payment provider."""

import hmac
import json

from django import forms
from django.conf import settings
from django.http import JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from shop import services
from shop.models import Order

MAX_BODY_BYTES = 10_000


@csrf_exempt  # no browser session here: the sender proves itself by the secret
@require_POST
def payment_received(request):
    """Take `{"message_id": ..., "order": ..., "amount_cents": ...}`, once.

    The provider sends again until it gets a 2xx answer, so "we have it already"
    is a 200 as well. It is answered only after everything has been committed.
    """
    if not secret_is_right(request.headers.get("X-Webhook-Secret", "")):
        return JsonResponse({"error": "wrong secret"}, status=403)
    try:
        message = parse(request)
    except ValueError as error:
        return JsonResponse({"error": str(error)}, status=400)
    order = Order.objects.filter(reference=message["order"]).first()
    if order is None:
        return JsonResponse({"error": "no such order"}, status=404)
    try:
        is_new = services.receive_payment(
            message_id=message["message_id"],
            raw_body=request.body,
            order=order,
            amount_cents=message["amount_cents"],
        )
    except services.MessageMismatchError:
        return JsonResponse({"error": "message_id was used before"}, status=409)
    return JsonResponse({"received": True, "new": is_new}, status=201 if is_new else 200)


def secret_is_right(given):
    """Compare in constant time, so that the answer's delay tells nothing."""
    expected = settings.SHOP_WEBHOOK_SECRET
    return hmac.compare_digest(given.encode(), expected.encode())


def parse(request):
    """Give the message, or raise ValueError with a sentence for the sender."""
    if len(request.body) > MAX_BODY_BYTES:
        raise ValueError("the message is too long")
    try:
        message = json.loads(request.body)
    except (ValueError, RecursionError):
        raise ValueError("the message is not JSON") from None
    form = PaymentMessage(message if isinstance(message, dict) else {})
    if not form.is_valid():
        raise ValueError(f"wrong or missing: {', '.join(sorted(form.errors))}")
    return form.cleaned_data


class PaymentMessage(forms.Form):
    message_id = forms.RegexField(r"^[A-Za-z0-9._:-]{1,100}\Z")
    order = forms.UUIDField()
    amount_cents = forms.IntegerField(min_value=1, max_value=100_000_000)
