"""What every page of ours shares: read-only, the jobs' database, and bounded list queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.utils.functional import cached_property

from ..conf import settings

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest

    ModelAdmin = admin.ModelAdmin[Any]
    BasePaginator = Paginator[Any]
else:
    ModelAdmin = admin.ModelAdmin
    BasePaginator = Paginator

COUNT_CAP = 10_000


class CappedPaginator(BasePaginator):
    """Counts up to a cap, exactly below it, so that no page counts a whole table."""

    cap = COUNT_CAP

    @cached_property
    def count(self) -> int:
        # The order stays in the subquery: with it the planner walks an index and stops early.
        rows: Any = self.object_list
        return int(rows.values("pk")[: self.cap + 1].count())


class IndexedChangeList(ChangeList):
    """Sorts by the columns of ``sortable_by`` alone, whatever the address asks for."""

    def get_ordering_field(self, field_name: Any) -> Any:
        allowed = field_name in (self.sortable_by or ())
        return super().get_ordering_field(field_name) if allowed else None


class ReadOnly:
    """No row is added, changed or deleted here.

    Said outright: a superuser's ``has_perm`` is true even for a permission that does not exist.
    """

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class ReadOnlyAdmin(ReadOnly, ModelAdmin):
    """Rows of the jobs' database to look at, each page in a bounded number of bounded queries."""

    paginator = CappedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    list_max_show_all = 0
    list_select_related = ()
    ordering = ("-id",)
    sortable_by = ("id",)

    class Media:
        css = {"all": ["django_durable_jobs/admin.css"]}

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return IndexedChangeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request)
        return rows.using(settings.DATABASE)
