"""Pages and pictures of a plan and its timelines, in one file each.

``html`` puts the page together, ``gantt`` draws timelines, ``stagegraph`` the stages, ``charts``
the rest; ``page_data`` is what the page's script reads, ``chrome`` the trace for Perfetto.
"""
