"""Training of many models at once on one cluster, for `dispatch.map`. Runs in the driver."""
