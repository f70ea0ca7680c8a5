"""Words and sizes: layouts, recipes, clusters, errors. Knows neither torch nor numpy."""
