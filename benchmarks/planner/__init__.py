"""How far can the planner, rehearsals and the partitioner be trusted?"""
