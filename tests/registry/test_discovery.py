from __future__ import annotations

from kvcompress.registry.discovery import METHODS_GROUP, canonical, find_offers
from tests.fake_site import Site


def test_offers_are_read_without_importing_anything(site: Site) -> None:
    site.distribution("My_Toys", {"a": "no_such_module", "b": "no_such_module:thing"})
    site.distribution("other", {"c": "x"}, group="somebody.else")
    offers = [offer for offer in find_offers(METHODS_GROUP) if offer.distribution == "my-toys"]
    assert [(o.selector, o.origin, o.value) for o in offers] == [
        ("my-toys:a", "my-toys 1.2", "no_such_module"),
        ("my-toys:b", "my-toys 1.2", "no_such_module:thing"),
    ]
    assert not any(offer.name == "c" for offer in find_offers(METHODS_GROUP))


def test_names_of_distributions_are_compared_in_canonical_form() -> None:
    assert canonical("My__Toys.v2") == "my-toys-v2"
