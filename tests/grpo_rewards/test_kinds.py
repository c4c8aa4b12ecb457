"""Golds of public data sets by their kinds: what says the same in other words, and what is another value.

A line of a table is a gold and its answers, with "§" between them and "¶" for a line break.
"""

import pytest

from grpo_rewards.math.comparison import RIGHT_VERDICTS, compare

WRONG = r"""
    4 § twenty-fifth § twenty fifth
    \cos(\frac{2\pi}{3})=-\frac12, \sin(\frac{2\pi}{3})=\frac{\sqrt3}{2}
    § \cos(\frac{3\pi}{3})=-\frac12, \sin(\frac{2\pi}{3})=\frac{\sqrt3}{2}
    y_1=e^{x}¶y_2=e^{2x} § y_1=e^{3x}¶y_2=e^{2x}
    \begin{align*} a&=b+c\\ d&=e-f\end{align*} § \begin{align*} a&=b+2c\\ d&=e-f\end{align*}
    x=1\\y=2 § x=3\\y=2 § x=2, y=1
    P(X_n=4)=\frac58 § P(X_n=3)=\frac58
    \log_2(3^{-\log_3(2)})=-1 § \log_1(3^{-\log_3(2)})=-1
    \frac{82}{198}=\frac{41}{99}=0.41 § \frac{83}{198}=\frac{41}{99}=0.41
    x \approx 1.3098 § x § 1.3
    The steady state current is 2 amps. § 3 § amps
    2+3=5 § 2+3=6 § 1=1 § 6
    25=5^2 § 36=6^2
    20\%=0.2 § 30\%=0.3
    (x+1)^2 = x^2+2x+1 § (x+2)^2=x^2+4x+4
    \cos (\pi)=-1, \sin (\pi)=0 § \cos (\pi)=0, \sin (\pi)=-1
    x^{2}+50=0 § x^{2}+51=0 § 1=1 § 0=1
    I=\frac{V}{R} § 1=1 § 0=1 § I=\frac{R}{V}
    \frac{1}{2^{99}} § \frac{1}{2^{98}}
    \sqrt{2^{200}+1} § 2^{100}
    \ln(10^{30}+1) § \ln(10^{30})
    x+\frac{1}{2^{100}} § x+\frac{1}{2^{101}}
    \begin{pmatrix} 4 \\ 6 \end{pmatrix} § \begin{pmatrix} 6 \\ 4 \end{pmatrix}
    \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} § \begin{bmatrix} 1 & 3 \\ 2 & 4 \end{bmatrix}
    1:2:3 § 1:3:2 § 1:6
    5-7 § -2
    1914-1918 § 1939-1943
    2020-05-07 § 2020-07-05
    2 \times 3,3 \times 3,4 \times 2 § 3 \times 2,3 \times 3,4 \times 2
    3 hours 20 minutes § 2 hours 30 minutes § 320
    2 \text{ kg } 500 \text{ g} § 5 \text{ kg } 200 \text{ g}
    (a) 5 (b) 4 § (a) 4 (b) 5
    5' 10" § 10' 5"
    3 R 2 § 2 R 3
    f(1)=2, f(2)=1 § f(1)=1, f(2)=2
    (1 2)(3 4) § (1 3)(2 4)
    A^T § A
    n \equiv 1 \mod 4 § n \equiv 1 \mod 3
    \operatorname{Var}(X) § X
    \angle ABC § \angle ACB
    \frac{\partial f}{\partial x} § \frac{\partial f}{\partial y}
    |z|^2 § z^2
    f^{-1}(x) § \frac{1}{f(x)}
    b > a > c § b > d > c
    IV § VI
    T, F, T § T, T, F
    -1,-1,1,1 § -1,1,1,1
    x<2 or x>3 § x<2 and x>3
    \cos (e) \approx-0.912 § \cos (e) \approx+0.912
    \sqrt{2} \approx 1.41 § \sqrt{2} \approx 2.41 § \sqrt{3} \approx 1.41
    x = \ln 5 \approx 1.609 § x = \ln 5 \approx 3
    \pi r^2 h § \pi r^2
    \frac{1}{2} b h § \frac{1}{2} q h
    f(2)=5 § 6 § f(2)=6
    x+y=12 § 12
    (3,2) § (p,q)=(2,3) § x=2, y=3
    \pm 3 § 3 § -3 § 9
    1\pm\sqrt2 § 1+\sqrt2 § 1-\sqrt2 § 1\pm\sqrt3
    3,-3 § 3
    [0,1] § 0<x<1 § 0\le x<1 § (0,1)
    (1,\infty) § x\ge1 § x<1 § [1,\infty)
    (-\infty,2) \cup (3,\infty) § x<2 and x>3 § x\le2 or x>3 § x>3
    \mathbb{R} § (0,\infty)
    x\ge3 § x\le3 § x>3
    \text{B} § (C) § C
    \textbf{(B)}\ 12 § 13 § C § 2
    8 § 8 (nine) § 9 (eight)
    2/3 § three thirds § one third
    5:30 \text{ p.m.} § 5:30 am § 5:20 pm § 17
    0.\overline{3} § 0.3 § 0.33 § 0.\overline{36}
    30 § 30 max § 30 or more
    5 \text{ cm} § 5 m § 5 in
    \$5 § 5 euros § £5 § €5 § 5 cents § 5 yen
    €5 § $5
    10\%\text{ increase} § 10% decrease
    3 \text{ units up} § 3 units down
    5 \text{ km north} § 5 \text{ km south}
    $3x$ § 3
    $5m$ § 5
    -2 s § -2
    2\pi r § 2\pi
    1=1 § 2=2
    x^2+1=0 § x^2+2=0 § 1=1
    3:4 § 4:3 § 12
    \frac{\pi}{2} § pi/3 § pi
    \sqrt{2} § \sqrt{3} \approx 1.414 § 1.414
    18 § 18以上 § 18左右 § 18多 § 18万 § 18千 § 18 тысяч § 18 mil § 18倍 § 18 Millionen § 18 falsch § 18 больше
    § 18点5 § 18%左右
    § 18 oder 19 § 18 million
    $2s$ § 2
    -3 m § -3
    10\% \text{ loss} § 10\% \text{ profit}
    \mathbf{a}\times\mathbf{b} § \mathbf{a}\cdot\mathbf{b}
"""
RIGHT = r"""
    \begin{align*} a&=b+c\\ d&=e-f\end{align*} § d=e-f, a=c+b
    x=1\\y=2 § y=2, x=1
    y^{2}=2 x+1,a=\frac{3}{4} § a=\frac34, y^{2}=2x+1
    P(X_n=4)=\frac58 § P(X_n=4)=0.625
    x \approx 1.3098 § 1.3098 § x\approx 1.3098
    The steady state current is 2 amps. § 2 § 2 amps
    $2,365,200,000$ beats/lifetime § 2,365,200,000 beats/lifetime
    \sqrt{2} \approx 1.41 § \sqrt{2} § \sqrt2 \approx 1.414
    2^{10}=1024 § 1024 § 2^{10}=1024
    \binom{10}{3}=120 § 120
    \frac12+\frac13=\frac56 § \frac56
    y = 2x+1 § 2x - y + 1 = 0 § y=1+2x
    \frac{x^2}{4}+\frac{y^2}{9}=1 § 9x^2+4y^2=36
    x^2=-4 § x^2+4=0
    1:2:3 § 1 : 2 : 3
    5-7 § 5 - 7
    3 hours 20 minutes § 3 hours and 20 minutes § 3\text{ h } 20\text{ min} § 20 minutes and 3 hours
    A^T § A^{T}
    A^{-1} § A^{-1}
    \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} § \left(\begin{array}{cc}1&2\\3&4\end{array}\right)
    -1,-1,1,1 § -1, -1, 1, 1
    x<2 or x>3 § x<2 \text{ or } x>3
    \sqrt{2}+\sqrt{3} § \sqrt{5+2\sqrt{6}}
    \pi r^2 h § \pi h r^2
    f(x)=1 § 1 § f(x) = 1
    g(3)=-2 § -2
    P(X=2)=\frac{3}{8} § \frac{3}{8} § 0.375
    \angle ABC = 45^\circ § 45 § 45^{\circ}
    a_{10}=19 § 19
    x_{\min}=-3 § -3
    \cos B=\frac{\sqrt{3}}{2} § \frac{\sqrt 3}{2}
    \tan\theta=\frac{3}{4} § 3/4
    |AB|=5 § 5
    S_{\triangle ABC}=6 § 6
    \frac{AB}{CD}=2 § 2
    V = 12\pi § 12\pi
    \overline{AB}=4 § 4
    n=5 § n = 5
    D(X)=1.2 § 1.2
    \lambda=2 § 2
    e=\frac{1}{2} § 1/2
    f'(x)=2x § 2x
    S_n=n^2 § n^2
    a_n=2n-1 § 2n-1
    \sin 2A=1 § 1
    \sin(A+B)=1 § 1
    2 § \sin 2A = 2 § x_1 = 2 § |z|=2 § n(A)=2 § \log_2 4=2
    (3,2) § (p,q)=(3,2) § (x, y) = (3, 2)
    (a,b,c)=(1,2,3) § (1,2,3)
    (x,y)=(5,8) \text{ or } (8,5) § (5,8), (8,5) § \{(5,8),(8,5)\}
    x=1, x=2 § 1, 2 § x=2, x=1 § x=1 \text{ or } x=2 § x=1 or 2
    x_1=1,x_2=2 § 1,2
    x=2\pm\sqrt{3} § 2+\sqrt3, 2-\sqrt3 § 2\pm\sqrt{3}
    \frac{-1 \pm \sqrt{5}}{2} § \frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}
    \pm 3 § 3, -3 § x=3, x=-3 § \{-3,3\} § ±3 § 3 \text{ and } -3 § 3 \text{ or } -3
    \pm\frac{1}{2} § -\frac12,\frac12
    (\pm 1, 2) § (1,2),(-1,2)
    \{\pm 1\} § -1,1
    1 \pm i § 1+i, 1-i
    x \geq 3 § [3,\infty) § 3 \le x § x\in[3,+\infty)
    (-\infty,2) \cup (3,\infty) § x<2 \text{ or } x>3 § x < 2 or x > 3 § x\in(-\infty,2)\cup(3,+\infty)
    [0,1] § 0\le x\le1 § \{x \mid 0 \le x \le 1\} § x \in [0,1]
    \{x | x<-1 \text{ or } x>4\} § (-\infty,-1)\cup(4,\infty)
    (1,+\infty) § x>1 § a>1 § (1,\infty)
    \{x: x \neq 2\} § (-\infty,2)\cup(2,\infty) § x\ne2
    \mathbb{R}\setminus\{0\} § (-\infty,0)\cup(0,\infty)
    -1<x<3 § (-1,3)
    x \le -1 § (-\infty,-1]
    \left[\frac12, 3\right) § \frac{1}{2} \leqslant x < 3
    0 < r < 5 § (0,5)
    \text{B} § B § (B) § \text{(B)} § \textbf{B} § B.
    \textbf{(B)}\ 12 § 12 § B § (B)
    \text{(E) }\frac{3}{4} § \frac34 § E
    \text{2 and 3} § 2, 3 § 2 and 3 § 2 \text{ and } 3
    8 § 8 (eight) § eight § Eight
    2/3 § two thirds § two-thirds
    1/2 § one half § one-half
    1000000 § 1,\!000,\!000 § 1\,000\,000 § 1{,}000{,}000
    5:30 \text{ p.m.} § 5:30 pm § 5:30\text{ PM}
    10:00 \text{ a.m.} § 10 am § 10:00 AM
    \text{Yes} § yes § \text{yes}
    \text{odd} § odd
    \text{Saturday} § Saturday § saturday
    0.\overline{3} § 1/3 § 0.\bar{3} § 0.\overline{33}
    0.1\overline{6} § 1/6 § \frac16
    2.\overline{45} § 27/11
    1/3 § 0.\overline{3} § 0.(3)
    0.\overline{142857} § 1/7
    -0.\overline{3} § -1/3
    0.\dot{3} § 1/3
    \frac{\sqrt{3}}{2} § sqrt(3)/2 § (sqrt(3))/2
    x^{3}-2x § x**3 - 2*x § x^3-2*x
    \sqrt{x+1} § sqrt(x+1)
    2^{n+1} § 2^(n+1) § 2**(n+1)
    \frac{x+1}{x-1} § (x+1)/(x-1)
    \log_2 3 § log_2(3)
    \tan x § tan(x) § tan x
    \arctan 2 § arctan(2)
    \theta § theta
    e^{2x} § exp(2x) § e^(2x) § e**(2*x) § exp(2*x)
    \sqrt[3]{2} § 2^(1/3)
    -\infty § -infinity § -inf
    \lfloor x \rfloor § floor(x)
    n! § n!
    3\pi § 3*pi § 3pi § 3π
    \frac{3\pi}{4} § 3pi/4 § 3*pi/4
    i\sqrt{2} § sqrt(2)*i § sqrt(2)i
    \frac{1}{\sqrt{2}} § 1/sqrt(2) § sqrt(2)/2
    -1/2 § \frac{1}{-2} § \frac{-1}{2} § -0.5
    30 § 30 min § 30 minutes
    30\text{ minutes} § 30 § 30 min
    5 § 5 in § 5 in. § 5 ft § 5 ft.
    12 \text{ cm}^2 § 12 § 12 cm^2 § 12\text{ square centimeters} § 12 \text{ sq cm} § 12 cm²
    60 \text{ km/h} § 60 § 60 kph § 60 \text{ kilometers per hour}
    9.8 \mathrm{~m}/\mathrm{s}^2 § 9.8 § 9.8 \text{ m/s}^2
    25\% § 25 § 25% § 25 percent
    45^\circ § 45 § 45 degrees
    \$12.50 § 12.5 § $12.50 § 12.50 dollars § \$12.5
    3 \text{ liters} § 3 L § 3
    70 \mathrm{~kg} § 70
    5 \frac{\text{km}}{\text{h}} § 5
    \sqrt{3} \approx 1.73 § \sqrt3
    \frac{\pi}{4} § \frac{\pi}{4} \approx 0.785
    \sin(30^\circ) § \sin 30^\circ
    x=-2 § x = - 2 § x  = -2
    \tan 15^\circ § \tan(15^{\circ})
    \{1,2,3\} § {1,2,3} § 1,2,3 § 3, 2, 1 § \left\{ 1, 2, 3 \right\}
    (1,2) § (1, 2) § \left(1,2\right)
    \emptyset § \varnothing § \{\} § ∅
    3:4 § 3 : 4
    2\sqrt{3}+1 § 1+2\sqrt{3}
    x^2+2x+1=0 § x^2+2x+1=0 § (x+1)^2=0
    y=2x § 2x § y = 2x
    4x-3y=0 § 4x=3y § 3y-4x=0
    ["1/2"] § 0.5
    ["3", "4"] § 3 § 4
    18 § 18个 § 18 个 § 18元 § 18 Äpfel § 18 pommes § 18 яблок § 18 りんご § 18개 § 18 manzanas § 18 ดอลลาร์ § 18 টাকা
    § 18 dollars
    14 - i § 14.0 + -1.0i
    |x| § abs(x)
    \infty § infinity
    \frac{\pi^2}{6} § pi^2/6
    (0,9) \cup (9,36) § (0,36)\setminus\{9\}
    \mathbb{R} § (-\infty,\infty)
    \{1\pm\sqrt{5},-2\} § -2, 1+\sqrt5, 1-\sqrt5
    3/4 § three quarters
    8 \frac{\mathrm{m}}{\mathrm{s}} § 8
    \frac{NO}{BO}=\frac{1}{\sqrt{6}} § \frac{1}{\sqrt{6}}
    $6m$ § 6m
    ["\\frac{1}{2}"] § \frac{1}{2}
"""


def pairs(table: str) -> list[tuple[str, str]]:
    """Return the (gold, answer) pairs of a table."""
    lines = table.strip().replace("\n    § ", " § ").splitlines()
    rows = [line.strip().replace("¶", "\n").split(" § ") for line in lines]
    return [(gold, answer) for gold, *answers in rows for answer in answers]


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_the_gold_in_another_form_is_the_gold_and_another_statement_is_not(every: int) -> None:
    wrong, right = pairs(WRONG)[::every], pairs(RIGHT)[::every]
    assert [pair for pair in wrong if compare(*pair) not in ("wrong", "timeout")] == []
    assert [pair for pair in right if compare(*pair, deadline=20.0) not in RIGHT_VERDICTS] == []
