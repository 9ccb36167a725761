"""One file a target of `export`; see `ranksearch.export.write` for what such a file must have."""
