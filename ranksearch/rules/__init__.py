"""Decision-flow rules: learned from evidence, drawn, and asked.

Knows the evidence table; nothing of stores, searches or trainers.
"""

from ranksearch.rules.draw import answer_text, flow_mermaid, flow_text
from ranksearch.rules.learn import learn
from ranksearch.rules.question import Question
from ranksearch.rules.recommend import Alternative, Basis, Recommendation, recommend
from ranksearch.rules.rule import Condition, Effect, Flow, Rule, Support, Verdict
from ranksearch.rules.settled import settled

__all__ = [
    "Alternative",
    "Basis",
    "Condition",
    "Effect",
    "Flow",
    "Question",
    "Recommendation",
    "Rule",
    "Support",
    "Verdict",
    "answer_text",
    "flow_mermaid",
    "flow_text",
    "learn",
    "recommend",
    "settled",
]
