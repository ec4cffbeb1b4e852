import pytest


@pytest.fixture(autouse=True)
def curves_are_drawn_on_request(request, monkeypatch):
    """Drawing curves.png takes longer than a tiny run; tests with the marker ``curves`` draw it."""
    if request.node.get_closest_marker("curves") is None:
        monkeypatch.setattr("grpo_moe.rl.record.plot_curves", lambda metrics, path: None)
