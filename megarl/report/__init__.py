"""A run to look at: its curve in the terminal, and one page: is it learning, where does the time go, what to change.

`reading` is what a run directory holds, `findings` and `answers` what that means, `charts` and `page` how it looks. Nothing
here imports torch; plotly is only asked for its javascript, when a page is written.
"""
