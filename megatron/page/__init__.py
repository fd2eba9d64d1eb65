"""The page of `tools/plan.py --html` and `tools/sweep.py --html`: one HTML file that needs no network.

`write` puts the data, page.css and the scripts into page.html. The scripts run in this order: base.js
(elements, numbers, sortable tables), chart.js (stacked bars, axes, legends), timeline.js (the schedule),
plan.js and sweep.js (the sections), main.js.
"""
