"""``report``: one run of a model as one self-contained HTML page."""

from torchhook.report.collect import collect
from torchhook.report.facts import Page
from torchhook.report.page import report

__all__ = ["Page", "collect", "report"]
