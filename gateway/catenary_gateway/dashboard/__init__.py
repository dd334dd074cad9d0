"""The dashboard: one page at `/`, its assets, and the JSON it shows.

* `api` - the routes below `/dashboard/v1`, for callers with the scope `view`, and the page.
* `answers` - answers kept for a moment: ten open pages cost the scheduler one call a second.
* `sources` - the data of each answer: from calls to the scheduler, or from this gateway.
* `converters` - messages of the Admin service as JSON values (pure).
* `local_facts` - facts that only this gateway has: load, rates, latencies, attainment.
* `files` - the files of the page, read once; `assets/` holds them. There is no build step.

The page and its assets hold no data and are public. They come with headers that forbid scripts,
styles and connections of any other origin, and any script within the page.
"""
