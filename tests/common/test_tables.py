from diffusion.common.text import markdown_table


def test_names_to_the_left_numbers_to_the_right():
    assert markdown_table(('what', 'unit:', 'dollars'), [('a', 'GPU-hour', 1234.5), ('longer', None, 7)]).splitlines() == [
        '| what   | unit     |  dollars |',
        '| ------ | -------- | -------: |',
        '| a      | GPU-hour | 1,234.50 |',
        '| longer |          |        7 |',
    ]
