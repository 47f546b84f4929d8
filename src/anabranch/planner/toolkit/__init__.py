"""Tools that planners share: prices of stages to be, devices for them, an estimate of the step."""
