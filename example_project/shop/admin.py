"""The shop's rows in the admin, to look at. The jobs bring pages of their own."""

from django.contrib import admin

from shop import models


class ReadOnlyAdmin(admin.ModelAdmin):
    def has_add_permission(self, request):
        return False

    def has_change_permission(self, request, obj=None):
        return False

    def has_delete_permission(self, request, obj=None):
        return False


@admin.register(models.Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ["sku", "name", "price"]


@admin.register(models.Order)
class OrderAdmin(ReadOnlyAdmin):
    list_display = ["short_reference", "customer", "product", "total", "state"]
    readonly_fields = ["reference"]
    list_select_related = ["product"]


@admin.register(models.Payment)
class PaymentAdmin(ReadOnlyAdmin):
    list_display = ["message_id", "order", "amount_cents", "booked_at"]
    list_select_related = ["order"]


@admin.register(models.Account)
class AccountAdmin(ReadOnlyAdmin):
    list_display = ["customer", "balance_cents"]


@admin.register(models.InboxMessage)
class InboxMessageAdmin(ReadOnlyAdmin):
    list_display = ["source", "message_id", "received_at"]


@admin.register(models.OutboxMessage)
class OutboxMessageAdmin(ReadOnlyAdmin):
    list_display = ["message_id", "topic", "created_at", "sent_at"]
    readonly_fields = ["message_id"]


@admin.register(models.SentMessage)
class SentMessageAdmin(ReadOnlyAdmin):
    list_display = ["message_id", "topic", "received_at"]


@admin.register(models.Airport)
class AirportAdmin(ReadOnlyAdmin):
    list_display = ["code", "name", "city", "country"]
    search_fields = ["code", "name"]


@admin.register(models.ImportedChunk)
class ImportedChunkAdmin(ReadOnlyAdmin):
    list_display = ["job_id", "first_row", "rows", "attempt"]
