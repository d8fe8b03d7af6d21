"""Curves as a picture."""

from xml.etree import ElementTree

from curve_picture import Curve, CurvePoint, draw_curves


def test_every_point_is_drawn_named_and_higher_where_its_value_is() -> None:
    points = (CurvePoint("500", 0.02, 0.01, 0.03), CurvePoint("5000", 0.01, 0.008, 0.012))
    drawn = draw_curves(
        "MSE & size",
        "pictures",
        "MSE",
        [Curve("none <1>", points), Curve("sign", points[::-1])],
        ["A note."],
    )
    root = ElementTree.fromstring(drawn)
    circles = [one for one in root.iter() if one.tag.endswith("circle")]
    assert len(circles) == 4
    heights = [float(one.attrib["cy"]) for one in circles]
    assert heights[0] < heights[1] and heights[0] == heights[3]
    words = " ".join(root.itertext())
    assert "none <1>, 500: 0.02 (0.01 to 0.03)" in words and "A note." in words
