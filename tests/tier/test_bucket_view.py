"""The view of the bucket between its listings: uploads and releases that a listing crosses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trace_store.storage.s3 import ObjectInfo, ObjectStore
from trace_store.tier.bucket import BucketView
from trace_store.tier.bucket_clock import BucketClock
from trace_store.tier.layout import Place, object_key
from trace_store.volume import Volume

PLACE: Place = ("run", "step-1")
FIRST, SECOND, THIRD = (f"000000000{number}-aa.arrow" for number in range(3))


class Bucket:
    """A directory as a bucket, and the view of it; every look at the clock is a second later than the one before."""

    def __init__(self, root: Path, volume: Volume) -> None:
        seconds = itertools.count(1)
        self.store = ObjectStore(f"file://{root}")
        self.view = BucketView(self.store, BucketClock(volume), lambda: float(next(seconds)))

    def put(self, name: str) -> None:
        self.store.put(object_key(PLACE, name), b"segment")

    def uploaded(self, name: str) -> None:
        self.put(name)
        self.view.add(PLACE, name, 7)

    @property
    def names(self) -> set[str]:
        return set(self.view.objects(PLACE))


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    pytest.importorskip("obstore")
    volume = Volume(tmp_path / "data", "a", "aa")
    yield Bucket(tmp_path / "objects", volume)
    volume.close()


@pytest.fixture
def after_listing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """``after_listing(call)``: the next listing has read everything, then this happens, then the view gets it."""
    listing = ObjectStore.listing

    def cross(call: Callable[[], None]) -> None:
        def slow(self: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
            found = list(listing(self, prefix))
            monkeypatch.setattr(ObjectStore, "listing", listing)
            call()
            return iter(found)

        monkeypatch.setattr(ObjectStore, "listing", slow)

    return cross


REFRESH = pytest.mark.parametrize(
    "refresh", [BucketView.refresh, lambda view: view.refresh_place(PLACE, 0.0)], ids=["everything", "one place"]
)


@REFRESH
def test_what_is_uploaded_while_a_listing_runs_stays_in_view(
    bucket: Bucket, after_listing: Callable[..., None], refresh: Callable[[BucketView], None]
) -> None:
    bucket.uploaded(FIRST)
    after_listing(lambda: bucket.uploaded(SECOND))
    refresh(bucket.view)
    assert bucket.names == {FIRST, SECOND}
    assert bucket.view.places() == [PLACE]


@REFRESH
def test_what_was_uploaded_before_a_listing_and_is_not_in_it_is_gone(
    bucket: Bucket, refresh: Callable[[BucketView], None]
) -> None:
    for name in (FIRST, SECOND):
        bucket.uploaded(name)
    bucket.store.delete([object_key(PLACE, SECOND)])  # by another server
    refresh(bucket.view)
    assert bucket.names == {FIRST}


@REFRESH
def test_what_is_released_while_a_listing_runs_does_not_come_back_with_it(
    bucket: Bucket, after_listing: Callable[..., None], refresh: Callable[[BucketView], None]
) -> None:
    for name in (FIRST, SECOND):
        bucket.uploaded(name)

    def upload_and_release() -> None:
        bucket.uploaded(THIRD)
        bucket.view.hide(PLACE, [FIRST, THIRD])

    after_listing(upload_and_release)
    refresh(bucket.view)
    assert bucket.names == {SECOND}
    refresh(bucket.view)  # the objects are still there
    assert bucket.names == {SECOND}


def test_an_upload_that_arrives_after_its_release_is_not_shown(bucket: Bucket) -> None:
    bucket.view.hide(PLACE, [FIRST])
    version = bucket.view.version(PLACE)
    bucket.uploaded(FIRST)
    assert bucket.names == set()
    assert bucket.view.places() == []
    assert bucket.view.version(PLACE) == version
    bucket.uploaded(SECOND)  # written anew
    assert bucket.names == {SECOND}
