"""A package, because some of its files share their names with those of other rooms."""
