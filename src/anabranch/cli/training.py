"""placeholder until the training verbs land"""
VERBS = ()
